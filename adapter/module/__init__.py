"""`ContractModule`, the LightningModule that hosts a trainer class, and the parts that it is made of.

May import the loop, gradients, discovery, callbacks, plumbing and the contract.
"""
