"""What is read and kept: files, hub repositories, question files, conversations, tokenised datasets."""
