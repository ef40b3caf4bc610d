"""Starting the processes of a run, and ending all of them when one has failed."""
