"""What is read: question files, conversations, tokenised datasets."""
