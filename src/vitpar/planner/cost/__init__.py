"""Cost model: predict the time of a step and the memory of every rank by replaying what the runtime does.

| module   | content                                                                                       |
|----------|-----------------------------------------------------------------------------------------------|
| elements | parameter elements that a rank stores, computes with and sums                                 |
| links    | groups of ranks that communicate, and the time of their operations                            |
| layer    | one layer: computing, communication, parameters, activations                                  |
| stage    | the layers of a pipeline stage, on the clock of a rank; lower bounds of layers for the search  |
| pipeline | the actions of a schedule, and their replay on all ranks                                      |
| memory   | bytes alive at every action of a rank                                                         |
| price    | a step: replayed stages, optimizer and memory, with their breakdown                           |
"""
