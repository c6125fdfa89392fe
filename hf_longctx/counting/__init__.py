"""Counts any causal language model of transformers from its own modules, without weights: parameters, FLOPs, what attention
exchanges, and the bytes that backward needs.

    building      the model and one forward of it on fake tensors, which have shapes and no memory
    stand_ins     attention, masks and experts that record their shapes instead of computing
    products      matrix products as torch runs them: those with weights, and all others
    saved         what autograd keeps of each layer
    count         the counts of two forwards of different lengths, made into counts per token and per token squared
    records       the results: plain data
    config_fields what a configuration says of layers that differ, and of heads, whatever their names

hardware/model_sizes.py asks for the counts of families that it has no formula for. The last two alone are imported with the
package: torch and transformers are imported once a model is counted.
"""
