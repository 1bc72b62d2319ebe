"""Writing whole or not at all: files, the atomic commit, the background thread, the reused host buffer.

May import the format, the codec, the plumbing and the contract.
"""
