"""Search for the fastest plan under a memory budget.

space       plans to consider: strategies of a stage, pipelines, micro-batches, batch sizes
sections    blocks that may have strategies of their own, in models with several kinds of blocks
options     costs of each strategy, without dominated strategies
bounds      lower bounds for uniform plans (one strategy, even stages)
relaxed     lower bounds for any mix of strategies and any split
dynamic     fastest mixes of strategies and splits of one outline, by costs of layers (tables)
ends        plans by layer, and layers that share a parameter
ranking     limits of a search, and its best plans so far
best        search over all outlines, by their bounds
reasons     why the obvious plans were not chosen
"""
