"""The page of a study, as one HTML file: `drawing` has its charts, `importance` says which settings matter."""
