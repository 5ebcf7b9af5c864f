"""What the kernels of Triton and of Gluon share: rules, masks, scores, and users' functions.

All of it is `triton.jit`: a `gluon.jit` kernel calls such functions as they are, as long as they make no tensors of
their own (`arange`, `zeros`), whose layout Gluon would ask for. Seen with Triton 3.6 and 3.9.
"""
