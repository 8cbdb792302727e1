//go:build !failpoints

package postgres

import "github.com/jackc/pgx/v5"

// failpoints does nothing: only programs that are built with the tag failpoints have them.
func failpoints(*pgx.ConnConfig) {}
