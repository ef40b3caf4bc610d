"""Programs inside the sandbox, which have Python's standard library alone: the confinement, the
process of a model's code, and the process that tests it. `isobit.rewards.sandbox` makes this folder
visible in the sandbox and starts `main` there.
"""
