"""Search for the fastest plan under a memory budget.

space       plans to consider: strategies of a stage, pipelines, micro-batches, batch sizes
sections    blocks that may have strategies of their own, in models with several kinds of blocks
options     costs of each strategy, without dominated strategies
bounds      lower bounds for uniform plans (one strategy, even stages)
relaxed     lower bounds for any mix of strategies and any split
expand      search of one outline: proposals (mixes), then enumeration, by costs of blocks (tables)
ends        other strategies of embed and head
ranking     limits of a search, and its best plans so far
best        best-first search over all outlines
scaling     best plans for fewer and more devices
reasons     why the obvious plans were not chosen
"""
