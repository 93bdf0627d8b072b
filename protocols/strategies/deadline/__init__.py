"""The strategy `deadline`: workflows are promised to be done in time, or refused at once."""
