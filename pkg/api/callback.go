package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Reports receives reports of workers about runs that they have accepted.
type Reports interface {
	// Known says whether key is that of reports on the run of an entry under a token.
	Known(entry, token int64, key string) bool
	// Take keeps a report. False: the run is not stored yet.
	Take(ctx context.Context, entry, token int64, body []byte) (bool, error)
}

// errNotYet makes a worker that is faster than we are come again.
var errNotYet = errors.New("the run is not known here yet; report again")

// callbackRoute is where workers report, by the address that came with the call: its key, bound to the lock
// of one entry, replaces a token.
func (a *API) callbackRoute() {
	a.raw(route{
		method: "POST", path: "/tasks/callback/{id}", id: "report-task",
		summary:  "Take what a worker reports about a run that it has accepted",
		bytesMax: a.cfg.BodyBytesMax,
	}, func(op *huma.Operation) {
		op.Description = "For workers, at the address that came with the call as `Penstock-Callback` (Cog: " +
			"`webhook`). The body is what a poll would be answered with."
		op.Parameters = append(op.Parameters, entryParameter())
		op.RequestBody = &huma.RequestBody{Content: jsonOf(&huma.Schema{})}
		for _, name := range []string{"token", "key"} {
			op.Parameters = append(op.Parameters,
				&huma.Param{Name: name, In: "query", Required: true, Schema: &huma.Schema{Type: huma.TypeString}})
		}
		op.Responses["200"] = &huma.Response{
			Description: "Taken, now or before",
			Content:     map[string]*huma.MediaType{"application/json": {Schema: a.schema(Job{})}},
		}
	}, a.takeReport)
}

func (a *API) takeReport(w http.ResponseWriter, r *http.Request) error {
	given := r.URL.Query()
	for name := range given {
		if name != "token" && name != "key" {
			return fmt.Errorf("%w: this address takes token and key, not %q", errInvalid, name)
		}
	}
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	token, terr := strconv.ParseInt(given.Get("token"), 10, 64)
	if a.cfg.Reports == nil || err != nil || terr != nil || !a.cfg.Reports.Known(id, token, given.Get("key")) {
		return fmt.Errorf("take report: no run has this address: %w", invalidation.ErrNotFound)
	}
	body, give, err := a.readBody(w, r, workers)
	defer give()
	if err != nil {
		return err
	}
	kept, err := a.cfg.Reports.Take(r.Context(), id, token, body)
	if err == nil && !kept {
		err = errNotYet
	}
	if err != nil {
		return err
	}
	writeJSON(w, "application/json", http.StatusOK, Job{strconv.FormatInt(id, 10), "reported"})
	return nil
}
