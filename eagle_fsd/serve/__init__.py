"""Serving a pair: an engine whose requests join and leave while others go on, and the endpoint on top of it"""
