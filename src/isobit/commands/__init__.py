"""What carries out a command on a finished or planned run, a model folder or a file."""
