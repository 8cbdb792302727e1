package migrations

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
)

// Digest identifies the embedded migrations by names and contents: 64 hexadecimal digits.
// Databases migrated by programs of the same digest have the same schema.
func Digest() (string, error) {
	sum := sha256.New()
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return "", err
	}
	for _, name := range names {
		text, err := files.ReadFile(name)
		if err != nil {
			return "", err
		}
		part := sha256.Sum256(text)
		sum.Write([]byte(name))
		sum.Write(part[:])
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}
