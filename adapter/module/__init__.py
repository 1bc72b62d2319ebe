"""`ContractModule`, the LightningModule that hosts a trainer class, and its parts.

May import the loop, gradients, discovery, callbacks, plumbing and the contract.
"""
