package invalidation

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
)

// DisableEntry takes an entry out of line until somebody enables it. One that runs ends its run: if that ends well
// the entry is done, else it waits disabled. ErrEntryNotFound and ErrState say that it is gone.
func DisableEntry(ctx context.Context, db postgres.DB, id EntryID, by By) error {
	return control(ctx, db, fmt.Sprintf("disable entry %d", id), `SELECT penstock.disable_entry($1, $2, $3)`, id, by.Reason, given(by.Actor))
}

// EnableEntry puts a disabled entry back into line where it stood.
func EnableEntry(ctx context.Context, db postgres.DB, id EntryID, by By) error {
	return control(ctx, db, fmt.Sprintf("enable entry %d", id), `SELECT penstock.enable_entry($1, $2, $3)`, id, by.Reason, given(by.Actor))
}
