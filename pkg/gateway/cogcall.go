package gateway

import (
	"bytes"
	"encoding/json"
	"net/http"
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
