"""What a model costs: layers x micro-batches in ns and bytes, modelled for a GPU or out of a
profile. Pure.
"""
