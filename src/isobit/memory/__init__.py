"""Plans of the memory of a CPU and of a GPU, and who has it in which phase."""
