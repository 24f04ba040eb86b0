"""What a plan costs: the time of a step and the memory of every rank, by replaying what the runtime does.

groups -> links          which ranks send each other something, and how long it takes
layer                    one layer: computing, sending, parameters, activations
streams -> stage         the layers of a pipeline stage one after the other, sending beside computing
memory                   what is alive at every action of a pipeline rank
price                    the step: stages replayed in the schedule's order; time and memory with their breakdown
"""
