"""``genlight check``: does a trainer class do what the contract, a resume and several ranks ask of it?"""
