"""What several test files share: fork launcher, deadlines, process helpers."""
