package worker

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"golang.org/x/net/http/httpguts"
)

// ClassifyFirstEvent classifies the data of the first event of a stream, where that is an error: servers
// that stream promise success before they know whether they have room. ok is false for any other event.
func ClassifyFirstEvent(data, request []byte) (o Outcome, ok bool) {
	// Nearly all events have no such member, and need not be decoded.
	if !bytes.Contains(data, []byte(`"error"`)) || !hasMember(data, "error") || hasMember(data, "choices") {
		return Outcome{}, false
	}
	return errorAfterOK(data, request, false), true
}

// ResolveHeaders reads the headers of a model with their secrets of the store in place: env:NAME and file:/path as
// whole values, ${env:NAME} within. References that cannot be read, and names and values that HTTP does not
// allow, are an error: a *HeaderError.
func ResolveHeaders(headers map[string]string, secrets SecretStore) (http.Header, error) {
	resolved, err := resolveHeaders(headers, secrets.Read)
	for name, values := range resolved {
		if !httpguts.ValidHeaderFieldName(name) {
			return nil, &HeaderError{Header: strconv.Quote(name), Err: errors.New("it is not the name of a header")}
		}
		if !httpguts.ValidHeaderFieldValue(values[0]) {
			return nil, &HeaderError{Header: name, Err: errors.New("its value has a control character")}
		}
	}
	return resolved, err
}

// GoesOn says whether an answer reports a run that has not ended: it goes on in the worker behind the answer. In each
// protocol one of status 303 does, and one of status 2xx may in the generic protocol and Cog's. words are those of the
// model.
func GoesOn(protocol Protocol, words Statuses, status int, body []byte) bool {
	if status == http.StatusSeeOther {
		return true
	}
	switch protocol {
	case ProtocolCog:
		return status == http.StatusAccepted
	case ProtocolGeneric:
		var reply genericReply
		if json.Unmarshal(body, &reply) != nil || reply.Status == "" {
			return false // an answer without a status is the result
		}
		return !isOneOf(reply.Status, words.Success) && !isOneOf(reply.Status, words.Failed) &&
			!isOneOf(reply.Status, words.Cancelled)
	}
	return false
}
