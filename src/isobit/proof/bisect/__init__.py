"""Where rollout and training part: checksums of every intermediate result, token by token, in the
order of the forward pass.
"""
