"""The decode loop: draft, verify, accept, commit; requests, receipts, sampling, noise, and faster forwards."""
