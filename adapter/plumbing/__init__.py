"""Storage and transfer of bytes: durable files, locks, HTTP, retries, URLs, redaction, text.

Independent of training. This package may import only the contract; every other package may import it.
"""
