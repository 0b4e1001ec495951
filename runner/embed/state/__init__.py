"""What a user's loop changes: captured before a batch, saved as shards of the ring, put back.

Must not know when: neither steps nor loaders.
"""
