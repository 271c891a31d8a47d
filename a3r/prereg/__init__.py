"""Pre-registration: what will be run and how it will be judged, checked and locked before anything runs."""
