"""The experiments of Celaya and Arronategui (2010), for the strategy `deadline`."""
