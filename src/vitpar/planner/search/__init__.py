"""Search for the fastest plan under a memory budget.

space       plans to consider: strategies of a stage, pipelines, micro-batches, batch sizes; layers that share
sections    blocks that may have strategies of their own, in models with several kinds of blocks
loads       least costs of layers under each strategy, as arrays
options     strategies of the layers of an outline
bounds      costs of the layers of a stage, and lower bounds as their sums; those of uniform plans
relaxed     lower bounds for any mix of strategies and any split
costed      prices of plans, and the costs of an outline
dynamic     fastest mixes of strategies and splits of one outline, by costs of layers (tables)
mixing      plans with several strategies or uneven stages
ranking     limits of a search, its best plans so far, and its outcome
best        search over all outlines, by their bounds
reasons     why the obvious plans were not chosen
"""
