"""The same trainer class twice, in a plain Python loop and under genlight: ``genlight compare``, ``run --shadow``.

The plain loop goes first, before any process group exists and before anything of torch is replaced, and leaves what it
reached after each step in a temporary folder. The training that follows is compared with that, step by step. May import
`module` and everything below it.
"""
