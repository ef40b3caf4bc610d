"""A step of many GPUs, put together from what one and two were measured to do."""
