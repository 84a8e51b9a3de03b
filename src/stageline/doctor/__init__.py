"""What `stageline doctor` looks at before anything is started, here and on other machines."""
