"""Virtual time: the real core against simulated sites, without sockets or sleeps.

- `clock`    time that jumps to the next thing to happen
- `wan`      links: bandwidth that is shared, latency, jitter, loss; `profiles` has measured ones
- `bodies`   real update and snapshot bodies of small vectors; where they are kept
- `trainer`  what a simulated worker's training is: planned at once, computed lazily, in batches
- `training` (torch) real training of a person's task, by the worker's own code
- `batched`  (torch) periods of many sites of one model, trained as one
- `fakefold` the fold process in plain Python, for everything but numerics
- `site`     an agent and its worker as one small machine; what it trains is a function
- `faults`   what may go wrong: delays, repetitions, crashes
- `fleet`    coordinator, fold and sites in one process: carries out the core's actions
- `chaos`    whole fault plans drawn from a seed
- `checkers` what must hold after every event
"""
