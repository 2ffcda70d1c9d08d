"""The decode loop: draft, verify, accept, commit; requests, sampling, noise, and timings of whole cycles."""
