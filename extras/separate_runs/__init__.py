"""Groups of a run that are separate runs: who meets when, and how.

In: objects on storage that any group may write first. Out: to the training loop the step and the samples that it continues with.
"""
