"""Who is the spy: everyone gets a word, one player a similar one."""
