"""What runs inside the sandbox, on Python's standard library alone: the confinement itself, the
process that holds a model's code, and the one that runs tests against it.

`isobit.rewards.sandbox` shows this folder to the sandbox and starts `main` there.
"""
