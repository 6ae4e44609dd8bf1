"""How numba compiles our kernels: `inner`, for functions that only other kernels call."""

import numba

inner = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""A function that only kernels call: without a door for Python, which takes a fifth of the time to
compile, and in the caller's file of the cache.
"""
