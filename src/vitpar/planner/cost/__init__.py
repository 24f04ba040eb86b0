"""The cost model: time of a step and memory of every rank, computed by replaying what the runtime does.

groups -> links          which ranks communicate, and how long it takes
layer                    one layer: computing, communication, parameters, activations
streams -> stage         the layers of a pipeline stage in sequence, overlapped with communication
memory                   bytes alive at every action of a pipeline rank
price                    the step: stages replayed in the schedule's order; time and memory with their breakdown
"""
