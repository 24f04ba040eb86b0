"""Cost model: predict the time of a step and the memory of every rank by replaying what the runtime does.

| module   | content                                                                                       |
|----------|-----------------------------------------------------------------------------------------------|
| elements | parameter elements that a rank stores, computes with and sums                                 |
| links    | groups of ranks that communicate, and the time of their operations                            |
| layer    | one layer: computing, communication, parameters, activations                                  |
| streams  | clock of a rank whose computing and communication overlap                                     |
| stage    | the layers of a pipeline stage in sequence; lower bounds of a layer's cost for the search     |
| pipeline | the actions of a schedule, and their replay on all ranks                                      |
| memory   | bytes alive at every action of a rank                                                         |
| price    | a step: replayed stages, optimizer and memory, with their breakdown                           |
"""
