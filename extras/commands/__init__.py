"""Everyday commands: `ls`, `status`, `verify`, `gc`, `forget`. Torch-free.

In: roots and this machine's memory. Out: lines for people, JSON and exit codes for programs.
"""
