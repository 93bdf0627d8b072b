"""Who is in the cluster, and who has gone."""
