"""The best plan under a memory budget, the next best, and what the obvious ones would take.

space       which plans are looked at: strategies of a stage, pipelines, micro-batches, batches
options     what a strategy costs a layer, and which strategies another one makes needless
bounds      what no plan of a kind with one strategy can beat
relaxed     what no plan of a kind can beat
runs        the ways to run a stage, the quickest first
expand      the plans of one kind, most promising first
best        the search itself, most promising kind first, until nothing left can be better
scaling     the best plans for fewer and more devices
reasons     why the obvious plans were not chosen
"""
