"""The page of a study, as one HTML file: `charts` draws the charts, `importance` estimates which settings matter."""
