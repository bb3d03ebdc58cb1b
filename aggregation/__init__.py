"""The mathematics of updates, on torch tensors of any device: no IO, no clocks, no randomness.

- `tiles`             flat tensors as bytes and back, and the piece in which everything is done
- `weights`           how much each update counts: by examples, by steps (FedNova), equally
- `fold`              weighted sums of flat parts, one update after the other, in the caller's order
- `server_optimizers` (init, step) pairs: average, momentum, Nesterov, delayed Nesterov, Adagrad,
                      Adam, Yogi
- `compensation`      what an update would have been from where the model is now (DC-ASGD)
- `screen`            is every number finite, and how long is the vector
- `prox`, `scaffold`  corrections of client drift, used in the local steps and at the server
"""
