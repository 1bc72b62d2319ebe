"""How bytes are kept and moved: durable files, locks, HTTP, retries, URLs, redaction, text.

Knows nothing of training. It may import the contract alone, and everybody may import it.
"""
