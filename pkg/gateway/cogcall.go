package gateway

import (
	"bytes"
	"cmp"
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/penstock/penstock/pkg/worker"
)

// wholePayload is the template that sends a worker the payload of an entry as it is.
const wholePayload = `"$payload"`

// predictionInput returns the input of a call in Cog's protocol, which is the payload of the entry that the call
// becomes: its task node makes a prediction of it, as the client did. A prediction without one has none to fill in.
func predictionInput(body []byte) (json.RawMessage, error) {
	input := json.RawMessage("{}")
	var other error
	err := predictionMembers(body, func(name string, value json.RawMessage) {
		if name == "input" {
			input = value
		} else if other == nil {
			other = bad(http.StatusBadRequest, "async_unsupported", name,
				"the payload of an entry is the input of a prediction: a call with the member %q cannot become one",
				name)
		}
	})
	if err != nil {
		return nil, err
	}
	return input, other
}

// predictionMembers calls found with each member of the body of a call in Cog's protocol, which may be empty.
func predictionMembers(body []byte, found func(name string, value json.RawMessage)) error {
	unfit := bad(http.StatusBadRequest, "invalid_json", "", "the body is not the JSON object of a prediction")
	begin := skipSpace(body, 0)
	if begin == len(body) {
		return nil
	}
	if body[begin] != '{' {
		return unfit
	}
	end, err := skipMembers(body, begin+1, 1, func(key []byte, at span) {
		var name string
		if json.Unmarshal(key, &name) == nil { // it is a text
			found(name, body[at.from:at.to])
		}
	})
	if err != nil || len(bytes.TrimSpace(body[end:])) > 0 {
		return unfit
	}
	return nil
}

// cogReserved are the members of a call in Cog's protocol that name its run, or an address to which the worker sends
// something of it.
var cogReserved = []string{"id", "webhook", "webhook_events_filter", "output_file_prefix"}

// fit refuses a live call in Cog's protocol that names its run, which may be that of an entry, or an address: workers
// reach some that the client does not. A body that is not JSON is refused, since its worker might read it otherwise.
func (r *route) fit(body []byte) error {
	if r.model.Protocol != worker.ProtocolCog || r.model.Async {
		return nil
	}
	var reserved error
	err := predictionMembers(body, func(name string, _ json.RawMessage) {
		// Servers in Go do not heed the case.
		if at := slices.IndexFunc(cogReserved, func(n string) bool { return strings.EqualFold(n, name) }); at >= 0 {
			reserved = bad(http.StatusBadRequest, "invalid_prediction", cogReserved[at],
				"a call may not have the member %s: its answer comes on this connection alone", cogReserved[at])
		}
	})
	return cmp.Or(err, reserved)
}
