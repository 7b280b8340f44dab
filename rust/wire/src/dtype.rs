//! Element types, under the names safetensors gives them.
//!
//! This is the closed list of types that an entry of a container can have. A tensor of another type travels as bytes.

/// Makes the type and its properties out of one table.
macro_rules! dtypes {
    ($($variant:ident $name:literal $bits:literal $array:expr,)+) => {
        /// The element type of an entry.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "each variant is the field's own name for the type")]
        pub enum Dtype {
            $($variant,)+
        }

        impl Dtype {
            /// Every element type, in the order of the enum.
            pub const ALL: [Self; [$($bits),+].len()] = [$(Self::$variant,)+];

            /// The name of the type in a safetensors header.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// The type with this safetensors name, if there is one.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Some(match name {
                    $($name => Self::$variant,)+
                    _ => return None,
                })
            }

            /// Bits per element. Elements of the 4 and 6 bit types are packed, so an entry of them has to end on a whole
            /// byte.
            #[must_use]
            pub fn bits(self) -> u64 {
                match self {
                    $(Self::$variant => $bits,)+
                }
            }

            /// What libraries of arrays call the type, `None` if its elements are smaller than a byte: they have no
            /// common name for those.
            #[must_use]
            pub fn array_name(self) -> Option<&'static str> {
                match self {
                    $(Self::$variant => $array,)+
                }
            }
        }
    };
}

// The type, its name in a header, its bits, and its name in libraries of arrays. Other processes of the same version
// number the types in this order.
dtypes! {
    Bool "BOOL" 8 Some("bool"),
    U8 "U8" 8 Some("uint8"),
    I8 "I8" 8 Some("int8"),
    F8E5M2 "F8_E5M2" 8 Some("float8_e5m2"),
    F8E4M3 "F8_E4M3" 8 Some("float8_e4m3fn"),
    I16 "I16" 16 Some("int16"),
    U16 "U16" 16 Some("uint16"),
    F16 "F16" 16 Some("float16"),
    BF16 "BF16" 16 Some("bfloat16"),
    I32 "I32" 32 Some("int32"),
    U32 "U32" 32 Some("uint32"),
    F32 "F32" 32 Some("float32"),
    C64 "C64" 64 Some("complex64"),
    F64 "F64" 64 Some("float64"),
    I64 "I64" 64 Some("int64"),
    U64 "U64" 64 Some("uint64"),
    F8E8M0 "F8_E8M0" 8 Some("float8_e8m0fnu"),
    F8E4M3Fnuz "F8_E4M3FNUZ" 8 Some("float8_e4m3fnuz"),
    F8E5M2Fnuz "F8_E5M2FNUZ" 8 Some("float8_e5m2fnuz"),
    F4 "F4" 4 None,
    F6E2M3 "F6_E2M3" 6 None,
    F6E3M2 "F6_E3M2" 6 None,
}

impl Dtype {
    /// Whether a tensor of this type can require a gradient: its elements are floating-point or complex numbers.
    #[must_use]
    pub fn has_gradient(self) -> bool {
        !matches!(
            self,
            Self::Bool | Self::U8 | Self::I8 | Self::I16 | Self::U16 | Self::I32 | Self::U32 | Self::I64 | Self::U64
        )
    }

    /// The alignment of an element's address in bytes: a power of two, at most 8. A complex number is as wide as two
    /// floats and aligned like one, but counts as 8 here, so that it may be read as one word. Payloads are laid out by
    /// descending alignment.
    #[must_use]
    pub fn alignment(self) -> u64 {
        (self.bits() / 8).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_are_powers_of_two_up_to_eight() {
        for dtype in Dtype::ALL {
            assert!([1, 2, 4, 8].contains(&dtype.alignment()), "{dtype:?}");
        }
        assert_eq!(Dtype::BF16.alignment(), 2);
        assert_eq!(Dtype::C64.alignment(), 8);
        assert_eq!(Dtype::F4.alignment(), 1);
    }
}
