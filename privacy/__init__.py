"""Keys, certificates and tokens as values: no IO, no clocks, no torch.

- `tokens`       join tokens, site secrets and API tokens; only their hashes are stored
- `keys`         a site's Ed25519 key and the proof that it holds it
- `certificates` a coordinator's own CA and server certificate, and what is wrong with one
"""
