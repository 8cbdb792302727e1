package gateway

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"

	"github.com/penstock/penstock/pkg/worker"
)

// keptBack says whether a header of the client is not for the worker: those of the connection, the
// credentials for this gateway, the words that it has understood, and those by which workers know the calls and runs of
// Penstock.
func keptBack(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding",
		"Upgrade", "Expect", "Authorization", "Cookie", "Prefer", "Accept-Encoding", "Content-Length", "X-Request-Id",
		"X-Api-Key", "Idempotency-Key":
		return true
	}
	return strings.HasPrefix(name, "X-Penstock-") || worker.OwnHeader(name)
}

// withoutHops removes the headers that the values of Connection name: they are for this hop alone (RFC 9110, section
// 7.6.1).
func withoutHops(h http.Header, connection []string) {
	for _, list := range connection {
		for name := range strings.SplitSeq(list, ",") {
			h.Del(strings.TrimSpace(name))
		}
	}
}

// attemptID is the id of the request for the worker, which begins with that of the client. Services hand one id through
// many calls, and servers that take it as the id of a run refuse one that still runs, as vLLM before 0.16 does: each
// attempt has an id of its own.
func (c *call) attemptID() string {
	if c.tries == 1 && c.request.Header.Get("X-Request-Id") != c.id { // it was made for this request
		return c.id
	}
	return c.id + "-" + strconv.FormatUint(rand.Uint64(), 36) //nolint:gosec // an id, no secret
}

// ownKey is the idempotency key of a client for a worker, which has calls of other clients and runs of entries as well:
// two of them that chose one key must not get each other's answers.
func ownKey(token, flow, key string) string {
	hash := sha256.New()
	for _, part := range []string{token, flow, key} {
		_, _ = fmt.Fprintf(hash, "%d:%s", len(part), part) // it has no errors
	}
	return hex.EncodeToString(hash.Sum(nil))
}
