"""The format on disk: names and the commit record (`record`), headers of safetensors (`headers`), and `slice_index`.

May import the plumbing and the contract.
"""
